"""One module for each thing that the models are held against: published figures
(`benchmarks.published`), and recorded tables and simulated clusters (`benchmarks.prediction`)."""
