"""The paper's claims, each as an experiment."""
