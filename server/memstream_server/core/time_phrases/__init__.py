"""Phrases of time in a question, such as "last week", and the time that they mean.

recognition: finds the phrases of a text, and whether it names nothing else; the window of a match, by its groups
lexicons: the words of English, German, French, Spanish and Portuguese, and the regular expressions built from them
east_asian: the phrases of Chinese and Japanese
calendar: windows of days, weeks, months, seasons and holidays in a time zone; how near a fragment is to them
"""
