"""One module for each thing published that the models are held against (`benchmarks.published`)."""
