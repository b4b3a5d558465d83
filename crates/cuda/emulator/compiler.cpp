// The run-time compiler: turns a source of kernels into a shared library with g++. Its bytes take the place of machine
// code for a GPU.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <unistd.h>

namespace {

struct Program {
    std::string source, log, image;
};

// The folder of this library, with the driver and the headers.
std::string own_folder() {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&own_folder), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool run(const std::string& command, const std::string& log_file, std::string& log) {
    const int status = std::system((command + " 2> '" + log_file + "'").c_str());
    log += read(log_file);
    return status == 0;
}

// Shared memory: a variable of the block, which the threads of the host have one each of, or the block's dynamic part.
std::string replace_shared(const std::string& text) {
    static const std::regex dynamic(R"(extern\s+__shared__\s+(?:(?:alignas|__align__)\s*\(\s*\d+\s*\)\s+)?(\w+)\s+(\w+)\s*\[\s*\]\s*;)");
    static const std::regex fixed(R"(__shared__)");
    const std::string first =
        std::regex_replace(text, dynamic, "$1* $2 = ($1*)emulated::emulated_current->dynamic_shared;");
    return std::regex_replace(first, fixed, "static thread_local");
}

bool compile(Program& program, const std::string& architecture, const std::string& features) {
    const bool check = std::getenv("LOCKSTEP_EMULATED_CHECK");
    char folder[] = "/tmp/emulated-gpu-XXXXXX";
    if (!mkdtemp(folder)) return false;
    const std::string at = folder, own = own_folder(), log = at + "/log";
    // Macros are expanded first, so that all kernels can be seen.
    std::ofstream(at + "/source.cu") << program.source;
    bool done = run("g++ -E -P -x c++ -std=c++17 '-D__launch_bounds__(...)=' -D__CUDA_ARCH__=" + architecture + features + " '" + at +
                        "/source.cu' -o '" + at + "/expanded'",
                    log, program.log);
    if (done) {
        const std::string expanded = replace_shared(read(at + "/expanded"));
        static const std::regex kernel(R"(extern "C" __global__ void\s+(\w+)\s*\()");
        std::set<std::string> names;
        for (std::sregex_iterator i(expanded.begin(), expanded.end(), kernel), end; i != end; ++i) names.insert((*i)[1]);
        std::ofstream whole(at + "/whole.cpp");
        whole << "#include \"" << own << "/device.h\"\n" << expanded << "\n";
        for (const std::string& name : names) whole << "EMULATED_KERNEL(" << name << ")\n";
        whole.close();
        // Every access calls `check.cpp`. The source stays where it is, for messages.
        const char* hooks = check ? "-g1 -DEMULATED_CHECK -fsanitize=thread --param tsan-instrument-func-entry-exit=0 " : "";
        // Products are not fused with sums, so that inlined functions give the same bits everywhere.
        done = run("g++ -std=c++17 -O2 -march=native -ffp-contract=off -fno-strict-aliasing -w -c -fPIC -fvisibility=hidden "
                   "-fno-gnu-unique " + std::string(hooks) + "'" + at + "/whole.cpp' -o '" + at + "/kernels.o'",
                   log, program.log) &&
               run("g++ -shared '" + at + "/kernels.o' -o '" + at + "/kernels.so' -L'" + own + "' -l:libcuda.so.1 -Wl,-rpath,'" +
                       own + "'",
                   log, program.log);
    }
    if (done) program.image = read(at + "/kernels.so");
    if (!check && !std::getenv("LOCKSTEP_EMULATED_KEEP")) std::system(("rm -rf '" + at + "'").c_str());
    return done;
}

} // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    *major = 13, *minor = 0;
    return 0;
}

int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
    *program = new Program{source, "", ""};
    return 0;
}

int nvrtcDestroyProgram(void** program) {
    delete static_cast<Program*>(*program);
    *program = nullptr;
    return 0;
}

int nvrtcCompileProgram(void* program, int count, const char* const* options) {
    std::string architecture = "900", features;
    for (int i = 0; i < count; i++) {
        // sm_90a is 900, with what only Hopper has.
        const char* number = std::strstr(options[i], "=sm_");
        if (number) architecture = std::to_string(std::atoi(number + 4)) + "0";
        if (std::strstr(options[i], "=sm_90a")) features = " -D__CUDA_ARCH_FEAT_SM90_ALL";
    }
    return compile(*static_cast<Program*>(program), architecture, features) ? 0 : 6;
}

int nvrtcGetProgramLogSize(void* program, std::size_t* bytes) {
    *bytes = static_cast<Program*>(program)->log.size() + 1;
    return 0;
}

int nvrtcGetProgramLog(void* program, char* log) {
    std::strcpy(log, static_cast<Program*>(program)->log.c_str());
    return 0;
}

int nvrtcGetCUBINSize(void* program, std::size_t* bytes) {
    *bytes = static_cast<Program*>(program)->image.size();
    return 0;
}

int nvrtcGetCUBIN(void* program, char* image) {
    const std::string& from = static_cast<Program*>(program)->image;
    std::memcpy(image, from.data(), from.size());
    return 0;
}

const char* nvrtcGetErrorString(int status) { return status ? "the source does not compile with g++" : "no error"; }
}
