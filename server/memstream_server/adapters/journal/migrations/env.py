"""Alembic's entry point: migrates over migrate.py's connection and in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
