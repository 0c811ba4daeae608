"""
Samples of a data set: records read from files, and encoded and measured by ms-swift's template.
"""
