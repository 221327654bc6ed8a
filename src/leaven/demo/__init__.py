"""``leaven demo``: text, tuning, transfer, three training runs and a report on one machine."""
