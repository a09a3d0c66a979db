"""Phrases of time in a question, such as "last week", and the time that they mean.

recognition: finds the phrases of a text; the window of a match, by the groups of its pattern
patterns: what a phrase looks like, in regular expressions built from a lexicon
lexicon: what a language has words for
germanic: the words of English and German
romance: the words of French, Spanish and Portuguese
east_asian: the phrases of Chinese and Japanese
calendar: windows of days, weeks, months, seasons and holidays in a time zone
asking: whether a question names nothing but a time
closeness: how near a fragment is to the windows of a question
"""
