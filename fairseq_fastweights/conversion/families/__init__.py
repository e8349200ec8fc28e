"""Published models' families: how the settings and weights of each are those of a `fast_weight_lm`."""
