"""Models, exact laws, samplers and ways to sample that several folders of tests share."""
