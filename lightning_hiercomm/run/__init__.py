"""One ``fit`` without a Trainer: schemes, the averaged model, gradients and checks of the program."""
