"""One module per verb of the command line: options in, library call, result out. `evaluator.cli` runs them."""
