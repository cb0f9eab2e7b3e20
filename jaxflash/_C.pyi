from typing import Any

def registrations() -> dict[str, Any]: ...
def build_info() -> dict[str, Any]: ...
def cpu_isa() -> str: ...
def cpu_workspace_floats(head_dim: int, value_head_dim: int) -> tuple[int, int]: ...
def cuda_workspace_floats(  # where the CUDA kernels are built
    implementation: str,
    B: int,
    T: int,
    S: int,
    N: int,
    K: int,
    H: int,
    Hv: int,
    num_sequences: int,
    dbias_elements: int,
    is_deterministic: bool,
) -> tuple[int, int]: ...
