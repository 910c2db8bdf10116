"""Small networks trained as a stack, many seeds in one batched computation: for the bandits and for scikit-learn."""
