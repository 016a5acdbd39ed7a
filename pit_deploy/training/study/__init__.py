"""The study of docs/study.md: tied and PIT models of two sizes, trained with the same code, data and care.

`python -m pit_deploy.training.study` runs what is not in the cache yet and writes the results and the page.
"""
