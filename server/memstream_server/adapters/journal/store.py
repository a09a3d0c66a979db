"""placeholder"""
SqlJournal = open_journal = None
