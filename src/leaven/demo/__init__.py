"""``leaven demo``: does the best learning rate of a small model transfer to wider ones?"""
