"""ms-swift's trainer on packs: data sets, loaders, losses, checkpoints, evaluation."""
