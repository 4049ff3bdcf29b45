"""Tokens of the longest training row of an episode.

Revision ID: 0014
Revises: 0013
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Add a nullable column, which neither engine writes to the rows that exist."""
    _drop_view()
    op.add_column("episode", sa.Column("longest_row", sa.BigInteger()))
    op.execute(
        sa.text("""
        CREATE VIEW episode_overview AS
        SELECT episode.group_id, episode.position, buffer.name AS buffer_name,
            episode_group.task_name, episode_group.prompt_uid, episode_group.group_status,
            episode.reward, episode.advantage, episode.num_tokens, episode.num_loss_tokens,
            episode.num_turns, episode.min_policy_version, episode.max_policy_version,
            episode.finish_reason, episode.metadata, episode.longest_row, run.name AS run_name,
            run.lineage AS run_lineage
        FROM episode
            JOIN episode_group ON episode_group.id = episode.group_id
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )


def downgrade() -> None:
    """Drop the column. `num_tokens` of episodes with turns stays that of their rows."""
    _drop_view()
    op.drop_column("episode", "longest_row")
    op.execute(
        sa.text("""
        CREATE VIEW episode_overview AS
        SELECT episode.group_id, episode.position, buffer.name AS buffer_name,
            episode_group.task_name, episode_group.prompt_uid, episode_group.group_status,
            episode.reward, episode.advantage, episode.num_tokens, episode.num_loss_tokens,
            episode.num_turns, episode.min_policy_version, episode.max_policy_version,
            episode.finish_reason, episode.metadata, run.name AS run_name,
            run.lineage AS run_lineage
        FROM episode
            JOIN episode_group ON episode_group.id = episode.group_id
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )


def _drop_view() -> None:
    op.execute(sa.DropView(sa.Table("episode_overview", sa.MetaData())))
