"""The runtimes that execute a model file, behind one interface."""
