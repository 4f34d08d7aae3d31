"""Pure functions of run folders: statistics, report, page."""
