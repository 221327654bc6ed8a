"""``leaven serve``: a local web server with live pages of runs, studies, checks and demos, and a planner."""
