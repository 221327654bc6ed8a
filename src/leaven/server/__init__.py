"""``leaven serve``: local pages of runs, studies and checks while they run, a planner, and the published runs."""
