"""Run a search: the store of its trials, its budget, its processes and the folder of the study."""
