"""The recipe of a run, and its files. This package imports no other package of leaven."""
