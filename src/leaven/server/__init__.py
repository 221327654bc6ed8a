"""``leaven serve``: a local web server with live pages of folders, a planner, and a page of published runs."""
