"""Dense evaluation on a CPU, compared with its alternatives."""
