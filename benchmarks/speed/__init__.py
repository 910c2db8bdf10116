"""Speed: prediction, training, draws, beside others."""
