"""What tests of several rooms share: models, exact laws, samplers and ways to sample."""
