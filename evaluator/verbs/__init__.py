"""One module a verb of the command line: options in, library call, answer out. `evaluator.cli` runs them."""
