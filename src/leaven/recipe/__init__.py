"""The recipe of a run. Imports no other part of leaven."""
