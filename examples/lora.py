"""A LoRA adapter with a posterior of its own: `python examples/lora.py`.

A small BERT, built here so that nothing is downloaded, is fine-tuned by an adapter alone on few, noisy labels. The
posterior is over the adapter and the new head; the base stays as it is.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import bayesadam as ba

torch.manual_seed(0)
WORDS, LENGTH, CLASSES = 30, 8, 3
config = BertConfig(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=LENGTH, num_labels=CLASSES,
)  # fmt: skip
base = BertForSequenceClassification(config)

ids = torch.randint(WORDS, (600, LENGTH))
labels = ids[:, 0] % CLASSES
noisy = torch.rand(600) < 0.2
labels[noisy] = torch.randint(CLASSES, (int(noisy.sum()),))
train, held_out, test = slice(0, 300), slice(300, 450), slice(450, 600)

model = get_peft_model(
    base, LoraConfig(r=8, target_modules=["query", "value", "dense"], modules_to_save=["classifier"])
)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.01)
for _ in range(400):
    rows = torch.randint(300, (32,))
    optimizer.zero_grad()
    model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    optimizer.step()

posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=300, batch_size=32, likelihood="classification")
print(f"{len(posterior.mode)} parameters in the posterior, {len(posterior.omitted)} frozen ones left out")

batch = {"input_ids": ids[test]}
with torch.no_grad():
    network = model.eval()(**batch).logits.softmax(dim=-1)
net = ba.calibrate(posterior, ({"input_ids": ids[held_out]}, labels[held_out]))
rows = {
    "network": network,
    "linearised": posterior.predict(batch).probs,
    "calibrated": net(batch).probs,
}
for name, probs in rows.items():
    nll = torch.nn.functional.nll_loss(probs.log(), labels[test]).item()
    print(f"{name}: test NLL {nll:.3f}, ECE {ba.scores.ece(probs, labels[test]):.3f}")
