"""ms-swift's trainer on packs: its data sets, loaders, losses, checkpoints and evaluation."""
