"""NVML and a CUDA driver of one GPU that does nothing, for libraries that are only imported.

Each call of the driver goes to the file $KVMIG_TEST_CUDA_CALLS, and fails as on a machine without a
GPU. NVML holds /dev/null open as the real one holds its device, until it is closed as often as it
was opened, and names the descriptor in $KVMIG_TEST_NVML_OPEN.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

CALLS = "KVMIG_TEST_CUDA_CALLS"
ANSWERS = ("cuInit", "cuGetProcAddress_v2")
"""Functions that libraries look for without being linked to them."""
DRIVER = re.compile(r"^ +U (cu[A-Z]\w+)", re.MULTILINE)
NOT_DRIVER = ("cublas", "cudnn", "cusparse", "cufft", "curand", "cusolver", "cupti", "cufile")
FUNCTION = """
int {name}(void) {{ return failed("{name}"); }}
"""
CUDA = f"""
#include <stdio.h>
#include <stdlib.h>
static int failed(const char *name) {{
    FILE *calls = fopen(getenv("{CALLS}"), "a");
    fprintf(calls, "%s\\n", name);
    fclose(calls);
    return 100;
}}
"""
NVML = """
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
typedef void *Device;
static int users, file = -1;
int nvmlInit_v2(void) {
    if (users++ == 0) file = open(DEVICE, O_RDONLY);
    return 0;
}
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) {
    if (users == 0) return 1;
    if (--users == 0) close(file);
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *one) { *one = (Device)1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *one) { *one = (Device)1; return 0; }
int nvmlDeviceGetCudaComputeCapability(Device one, int *major, int *minor) {
    *major = 9, *minor = 0;
    return 0;
}
int nvmlDeviceGetName(Device one, char *name, unsigned size) {
    strncpy(name, "NVIDIA H100", size);
    return 0;
}
int nvmlDeviceGetUUID(Device one, char *name, unsigned size) {
    strncpy(name, "GPU-00000000-0000-0000-0000-000000000000", size);
    return 0;
}
int nvmlDeviceGetMemoryInfo(Device one, unsigned long long *bytes) {
    bytes[0] = bytes[1] = 80ULL << 30, bytes[2] = 0;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device one, unsigned *count, void *every) {
    *count = 0;
    return 0;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device one, unsigned *count, void *every) {
    *count = 0;
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device one, unsigned *count, void *every) {
    *count = 0;
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
const char *nvmlErrorString(int error) { return "error"; }
"""


def build(folder: Path, libraries: Iterable[Path], device: Path) -> None:
    """Into a folder for LD_LIBRARY_PATH.

    libraries: what is linked to the driver. device: the file that NVML holds open.
    """
    wanted = set(ANSWERS)
    for library in libraries:
        shown = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        found = DRIVER.findall(shown.stdout)
        wanted |= {one for one in found if not one.lower().startswith(NOT_DRIVER)}
    functions = "".join(FUNCTION.format(name=name) for name in sorted(wanted))
    compile_library(folder / "libcuda.so.1", CUDA + functions)
    compile_library(folder / "libnvidia-ml.so.1", f'#define DEVICE "{device}"\n{NVML}')


def compile_library(path: Path, source: str) -> None:
    """Raises CalledProcessError."""
    name = f"-Wl,-soname,{path.name}"
    words = ["gcc", "-w", "-shared", "-fPIC", name, "-xc", "-", "-o", str(path)]
    subprocess.run(words, input=source, text=True, check=True)
