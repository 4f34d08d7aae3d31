"""Reports and comparisons of runs: statistics, tables, HTML pages."""
