"""Which limits follow from recorded runs?  Reads timings, fits and tests limits, and draws them."""
