"""A posterior over a LoRA adapter alone: NLL and ECE before and after calibration, for a classifier and a causal LM.

    python benchmarks/lora.py [--quick] [--out out/bench]
    BAYESADAM_DATA=... python benchmarks/lora.py --text --device cuda --jobs 5 [--seeds 5]

With --text there are two tasks of real text instead, and --device, --jobs and --seeds are theirs: see lora_text.py.

Without it nothing is read: a small BERT and a small GPT-2 are trained on one made-up task, frozen, and adapted to
another by LoRA with plain AdamW. The classifier reads which of four families of words a sentence holds most of; its new
task has a quarter of the words in other families and one label in ten drawn at random. The language model learns one
Markov chain, then another from a few sentences, and predicts every next token. The posterior is over the adapter (and
the new head of the classifier); validation sentences calibrate, test sentences score.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import bayesadam as ba
import lora_text
from harness import arguments, score_table, write_results
from lora_tasks import Batch, Task, batches, fit, scored, seeded

WORDS, LENGTH, FAMILIES, WIDTH = 16, 12, 4, 32


# --- the two tasks --------------------------------------------------------------------------------------------------


def sentences(count: int, family: Tensor, noise: float, seed: int) -> Batch:
    """Words, some of them padding, and the family that most of them are of; a share `noise` of the labels is drawn."""
    generator = seeded(seed)
    x = torch.randint(WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    counts = torch.zeros(count, FAMILIES).scatter_add_(1, family[x], mask.float())
    y = (counts + 1e-3 * torch.rand(counts.shape, generator=generator)).argmax(dim=1)
    drawn = torch.randint(FAMILIES, (count,), generator=generator)
    y = torch.where(torch.rand(count, generator=generator) < noise, drawn, y)
    return {"input_ids": x, "attention_mask": mask}, y


def classifier(quick: bool) -> Task:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=LENGTH,
        num_labels=FAMILIES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    old = torch.arange(WORDS) % FAMILIES
    new = torch.where(torch.arange(WORDS) < WORDS // 4, (old + 1) % FAMILIES, old)
    fit(model, sentences(2000, old, 0.0, seed=3), logits, 50 if quick else 250, lr=3e-3)
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"]))
    sizes = (100, 100, 300) if quick else (200, 200, 2000)
    parts = [sentences(size, new, 0.1, seed) for seed, size in enumerate(sizes, start=10)]
    return Task(adapted, *parts, forward=logits)


def chain(count: int, temperature: float, language: int, seed: int) -> Batch:
    """Sentences of a Markov chain; the classes are the words that come next."""
    transitions = (torch.randn(WORDS, WORDS, generator=seeded(language)) / temperature).softmax(dim=-1)
    generator = seeded(seed)
    x = torch.empty(count, LENGTH, dtype=torch.long)
    x[:, 0] = torch.randint(WORDS, (count,), generator=generator)
    for t in range(1, LENGTH):
        x[:, t] = torch.multinomial(transitions[x[:, t - 1]], 1, generator=generator).squeeze(1)
    return {"input_ids": x, "attention_mask": torch.ones_like(x)}, x[:, 1:]


def language_model(quick: bool) -> Task:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    fit(model, chain(2000, 0.4, language=1, seed=3), next_tokens, 50 if quick else 250, lr=4e-3)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    sizes = (16, 16, 24) if quick else (40, 40, 100)
    parts = [chain(size, 0.4, 2, seed) for seed, size in enumerate(sizes, start=10)]
    return Task(get_peft_model(model, lora), *parts, forward=next_tokens)


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**inputs).logits
    return found


def next_tokens(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The last output is about a word that is not in the sentence."""
    return logits(model, inputs)[:, :-1]


# --- the posterior --------------------------------------------------------------------------------------------------


def measured(task: Task, steps: int) -> dict[str, Any]:
    optimizer = fit(task.model, task.train, task.forward, steps, lr=1e-2).optimizer
    trainable = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
    # N is what the loss averages over: sentences for the classifier, tokens for the language model.
    raw = ba.Posterior.from_optimizer(task.model, optimizer, n_data=task.train[1].numel())
    assert set(raw.mode) == trainable, "the posterior is over the adapter, no more and no less"
    options = {"likelihood": "classification", "forward": task.forward}
    rows: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        rows["network"] = scored(task.forward(task.model, task.test[0]).softmax(dim=-1), task.test[1])
    began = time.perf_counter()
    tuned = ba.calibrate(raw, batches(task.validation, 50), **options)
    seconds = {"calibrate": time.perf_counter() - began}
    for label, posterior in (("before", raw), ("after", tuned)):
        began = time.perf_counter()
        probs = [posterior.predict(inputs, **options).probs for inputs, _ in batches(task.test, 100)]
        seconds["predict"] = time.perf_counter() - began
        rows[f"linearised, {label}"] = scored(torch.cat(probs), task.test[1])
    return {
        "weights": raw.n_weights,
        "weights_of_model": sum(parameter.numel() for parameter in task.model.parameters()),
        "n_data": raw.n_data,
        "seconds": seconds,
        "scores": rows,
    }


def main() -> None:
    parser = arguments(__doc__, quick="less training, less data", device=True, jobs=1)
    parser.add_argument("--text", action="store_true", help="two tasks of real text")
    parser.add_argument("--seeds", type=int, default=5, help="of the tasks of real text")
    options = parser.parse_args()
    if options.text:
        lora_text.run(options)
        return
    torch.set_num_threads(2)
    steps = 60 if options.quick else 400
    results = {
        "sequence classifier": measured(classifier(options.quick), steps),
        "causal LM": measured(language_model(options.quick), steps),
    }
    for name, result in results.items():
        print(f"{name}: {result['weights']:,} of {result['weights_of_model']:,} weights, N = {result['n_data']:g}")
        print(score_table(result["scores"], result["scores"]["network"]))
        print(", ".join(f"{what} {value:.1f} s" for what, value in result["seconds"].items()), end="\n\n")
    write_results(options.out, "lora", results)
    for name, result in results.items():
        after, before = result["scores"]["linearised, after"], result["scores"]["network"]
        print(
            f"{name}: after calibration over the network's, ECE {after['ece'] / before['ece']:.3f}, "
            f"NLL {after['nll'] / before['nll']:.3f} (target: at most 1)"
        )


if __name__ == "__main__":
    main()
