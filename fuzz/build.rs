//! The HTTP parser of kernels is C++. Each jump in it calls a function of `src/http.rs`, which counts: compilers that fuzzers know
//! better are not everywhere.

fn main() {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("src/http.cpp")
        .includes(["../device/include", "../crates/capi/include"])
        .opt_level(1)
        .flag("-fsanitize-coverage=trace-pc")
        .flag("-fsanitize=undefined")
        .flag("-fsanitize-undefined-trap-on-error")
        .warnings_into_errors(true)
        .compile("http");
    // The fuzzer has a function of this name too, which refuses.
    println!("cargo::rustc-link-arg-bin=http=-Wl,--wrap=__sanitizer_cov_trace_pc");
    for watched in ["src/http.cpp", "../device/include/spinio"] {
        println!("cargo::rerun-if-changed={watched}");
    }
}
