"""What the command line runs: each experiment computes, draws, and writes `metrics.json` and its pictures."""
