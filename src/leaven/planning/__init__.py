"""Plan a training run before accelerators are rented: whether it fits, how fast it is and how long it takes."""
