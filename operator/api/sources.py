"""Where a model's weights come from."""

from __future__ import annotations

from pydantic import Field

from .scalars import AbsolutePath, ApiModel, ObjectName


class HostPathSource(ApiModel):
    """A directory that exists on every node the ranks may run on."""

    path: AbsolutePath = Field(description="Directory that holds config.json, tokenizer and weights.")


class ClaimSource(ApiModel):
    """A PersistentVolumeClaim of the same namespace, mounted read-only."""

    claim_name: ObjectName = Field(description="Name of the claim.")
    sub_path: str | None = Field(
        None, max_length=512, description="Directory inside the volume that holds the model; unset: its root."
    )


class ImageSource(ApiModel):
    """An OCI image or artifact mounted as a read-only volume (needs the ImageVolume feature of the node)."""

    reference: str = Field(min_length=1, max_length=512, description="Image reference, preferably with a digest.")


class HuggingFaceSource(ApiModel):
    """A model the engine downloads when it starts; every rank downloads its own copy."""

    repo: str = Field(min_length=1, max_length=256, description="Repository, for example deepseek-ai/DeepSeek-V3.1.")
    revision: str | None = Field(None, max_length=128, description="Branch, tag or commit; unset: the default branch.")


class ModelSource(ApiModel):
    """Where the weights come from; set exactly one of the fields."""

    host_path: HostPathSource | None = Field(None, description="A directory of the node.")
    persistent_volume_claim: ClaimSource | None = Field(None, description="A volume claim.")
    image: ImageSource | None = Field(None, description="An OCI image or artifact.")
    hugging_face: HuggingFaceSource | None = Field(None, description="A Hugging Face repository.")
