"""Run by Alembic: migrates over the connection, and in the transaction, that migrate.py hands in."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
