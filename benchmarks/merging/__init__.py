"""What posteriors are used for beside predictions: merging, learning on, auditing, choosing what to label."""
