"""What lecture notebooks are made with.

pictures: `subplots`, `show` - one style, alt text, comparable descriptions.
predict:  `predict`, `measured`, `explain` - a guess before every measurement.
widgets:  `explorer` - a knob, a picture and a line of text.
build:    notebooks/src/*.py -> executed notebooks/*.ipynb, and the check that they agree.
slides:   decks that open without a network.
"""
