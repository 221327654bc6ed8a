"""Will it fit, how fast, how long: answered before an accelerator is rented."""
