"""Commands of `packplan plan` that foretell a run, and the options of forecasts."""
