"""Where the options of verbs come from: shared ones, the fields of dataclasses, a file and the environment."""
