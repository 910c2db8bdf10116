"""A tiny BERT with a LoRA adapter and a new head, trained like any other: what docs/lora.md begins with.

    from examples.adapter import base, held_out, model, optimizer

It is untrained but for the adapter; put your own, loaded by `from_pretrained`, in its place.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
base = BertForSequenceClassification(
    BertConfig(
        vocab_size=10, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=6, num_labels=3,
    )
)  # fmt: skip
ids = torch.randint(10, (120, 6))  # texts of six tokens, labelled by their first
labels = ids[:, 0] % 3
batches = [{"input_ids": ids[i : i + 20], "labels": labels[i : i + 20]} for i in range(0, 80, 20)]
dataset = [{"input_ids": ids[i], "labels": labels[i]} for i in range(80)]  # as transformers.Trainer takes it
held_out = {"input_ids": ids[80:]}, labels[80:]

model = get_peft_model(base, LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(10):
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

if __name__ == "__main__":
    print(f"loss of the last batch: {model(**batches[-1]).loss:.3f}")
