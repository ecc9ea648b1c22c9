"""Classes that end the program in every method of TensorRT's interfaces, from NvInferImpl.h: a stand-in overrides what it needs."""

import re
import sys

METHOD = re.compile(r"virtual ([^;]*?) (\w+)\(([^()]*)\)( const)? noexcept\s*= 0;")

with open(sys.argv[1]) as file:
    text = re.sub(r"TRT_(?:DEPRECATED|NODISCARD) ", "", file.read())
print("#pragma once\n#include <NvInferRuntime.h>\n#include <cstdlib>\nnamespace unused {\nusing namespace nvinfer1;")
for name in ("VRuntime", "VCudaEngine", "VExecutionContext"):
    body = re.search(rf"class {name} : public VRoot\n\{{(.*?)\n\}};", text, re.DOTALL)[1]
    print(f"struct {name} : apiv::{name} {{")
    for result, method, parameters, const in METHOD.findall(body):
        print(f"  {result} {method}({parameters}){const} noexcept override {{ std::abort(); }}")
    print("};")
print("}")
