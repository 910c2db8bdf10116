"""Readers that test_newer_optimisers.py tests: most are made otherwise than of a list of parameters."""

READERS = (
    *("schedule-free", "schedule-free-pytorch-optimizer", "adam-mini", "fusedadam"),
    *("muon-with-adam", "muon-timm", "muon-pytorch-optimizer", "torchao-adam", "torchao-adamw", "sgd-schedule-free"),
)
