"""Data with an exact position: the sampler, the data module that resumes, and the cache of prepared data sets."""
