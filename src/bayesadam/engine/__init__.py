"""Small networks trained as a stack: their recipe, their random numbers, their step, and the rules they learn by."""
