"""The native runner: a C++ program around ONNX Runtime (`cpp/`), how it is built, and a runtime over its process."""
