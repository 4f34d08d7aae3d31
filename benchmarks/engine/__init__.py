"""Dense evaluation on a CPU, beside its alternatives."""
