"""A text classifier trained by Hugging Face's Trainer, with a posterior at its end: `python
examples/huggingface_classifier.py`.

The model is built here and the text made up, so that nothing is downloaded: reviews of eight words, of which two say
what the writer thought, and not always the same. `AutoModelForSequenceClassification.from_pretrained(...)` and a
tokenizer go in their place.
"""

import tempfile
from pathlib import Path

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

import bayesadam as ba
from bayesadam.trainers.huggingface import PosteriorCallback

torch.manual_seed(0)
FILLER, GOOD, BAD = range(2, 30), torch.tensor([30, 31, 32]), torch.tensor([33, 34, 35])


def review(liked: bool) -> list[int]:
    """Eight words; each of the two telling ones agrees with the writer six times in seven."""
    words = torch.randint(FILLER.start, FILLER.stop, (8,))
    for place in torch.randperm(8)[:2]:
        telling = GOOD if liked == bool(torch.rand(()) < 6 / 7) else BAD
        words[place] = telling[torch.randint(3, ())]
    return words.tolist()


rows = [{"input_ids": review(liked=i % 2 == 1), "attention_mask": [1] * 8, "labels": i % 2} for i in range(700)]
train, held_out, test = rows[:400], rows[400:550], rows[550:]
config = DistilBertConfig(vocab_size=40, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=8)
model = DistilBertForSequenceClassification(config)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=6, per_device_train_batch_size=25, learning_rate=2e-3, weight_decay=0.01, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no", seed=0,
    )  # fmt: skip
    callback = PosteriorCallback(likelihood="classification")
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out, callbacks=[callback])
    trainer.train()
    print(
        f"the posterior of {callback.posterior.n_data:.0f} reviews is in {Path(folder, 'posterior.safetensors').name}"
    )


def batch_of(rows: list[dict]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs, and the labels."""
    inputs = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    return inputs, torch.tensor([row["labels"] for row in rows])


net = ba.calibrate(callback.posterior, batch_of(held_out))
(now, _), (alone, _) = net.report.nll["calibrated"], net.report.nll["network alone"]
print(f"held-out NLL {now:.3f}, of the network alone {alone:.3f}")
batch, labels = batch_of(test)
p = net(batch)
right = p.probs.argmax(dim=-1) == labels
print(f"test accuracy {right.float().mean():.3f}, ECE {ba.scores.ece(p.probs, labels):.3f}")
surest = p.doubt.argsort()[: len(test) // 2]
print(f"test accuracy of the half that it is surest of {right[surest].float().mean():.3f}; a person reads the rest")
sets = p.set(0.9)
print(f"90 % prediction sets hold the true class {sets[range(len(test)), labels].float().mean():.3f} of the time")
