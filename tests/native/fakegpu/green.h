// Green contexts of the tests' GPUs: their SMs, 64 at most, in groups that streams keep to. For
// gpu.cpp alone.
//
// As the driver's: a resource is what a call has filled, copied or not; a group that comes out of a
// split is split no further; a context takes groups of one split; a stream outlives its context
// only as an error (917). The primary context may be current while work goes to such a stream.
#ifndef FAKEGPU_GREEN_H
#define FAKEGPU_GREEN_H

#include "machine.h"

namespace {

constexpr int kSmResource = 1, kDefaultStream = 1, kNonBlocking = 1;
constexpr unsigned kGroup = 8;  // of SMs, on sm_90

struct Resource {  // CUdevResource
    int type;
    unsigned split;       // which has made it; 0: none
    uint64_t sms;         // a bit each
    unsigned char inside[80];
    unsigned count;
    unsigned char rest[36];
    Resource *next;
};
static_assert(sizeof(Resource) == 144, "CUdevResource");

std::map<void *, uint64_t> &descriptors = *new std::map<void *, uint64_t>;
unsigned splits = 0;

uint64_t bits(unsigned count) { return count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0); }

Resource resource_of(unsigned split, uint64_t sms) {
    Resource made{};
    made.type = kSmResource;
    made.split = split;
    made.sms = sms;
    made.count = static_cast<unsigned>(__builtin_popcountll(sms));
    return made;
}

}  // namespace

CALL(kNothing, cuDeviceGetDevResource, int device, Resource *found, int type)
    if (!visible(device)) return kInvalidDevice;
    if (type != kSmResource) return kInvalidValue;
    *found = resource_of(0, bits(static_cast<unsigned>(sms())));
    return kSuccess;
}
CALL(kNothing, cuDevSmResourceSplitByCount, Resource *made, unsigned *count, const Resource *whole,
     Resource *left, unsigned flags, unsigned least)
    if (whole->type != kSmResource || flags || !least) return kInvalidValue;
    if (whole->split) return kInvalidResources;
    const unsigned size = (least + kGroup - 1) / kGroup * kGroup;
    const unsigned most = whole->count / size;
    const unsigned wanted = made ? std::min(*count, most) : most;
    if (made) {
        ++splits;
        for (unsigned i = 0; i < wanted; ++i)
            made[i] = resource_of(splits, bits(size) << (i * size));
        if (left) *left = resource_of(splits, whole->sms & ~bits(wanted * size));
    }
    *count = wanted;
    return most ? kSuccess : kInvalidResources;
}
CALL(kNothing, cuDevResourceGenerateDesc, void **made, const Resource *resources, unsigned count)
    if (!count) return kInvalidValue;
    uint64_t sms = 0;
    for (unsigned i = 0; i < count; ++i) {
        if (resources[i].type != kSmResource) return kInvalidValue;
        if (resources[i].split != resources[0].split || (sms & resources[i].sms))
            return kInvalidResources;
        sms |= resources[i].sms;
    }
    *made = new char;  // lives as long as the process
    descriptors[*made] = sms;
    return kSuccess;
}
CALL(kNothing, cuGreenCtxCreate, void **made, void *descriptor, int device, unsigned flags)
    const auto found = descriptors.find(descriptor);
    if (found == descriptors.end() || flags != kDefaultStream) return kInvalidValue;
    if (!visible(device)) return kInvalidDevice;
    *made = new char;
    machine.greens[*made] = std::make_shared<Green>(Green{found->second});
    return kSuccess;
}
CALL(kNothing, cuGreenCtxDestroy, void *green)
    const auto found = machine.greens.find(green);
    if (found == machine.greens.end()) return kInvalidContext;
    found->second->destroyed = true;
    machine.greens.erase(found);
    delete static_cast<char *>(green);
    return kSuccess;
}
CALL(kContext, cuGreenCtxStreamCreate, void **made, void *green, unsigned flags, int priority)
    const auto found = machine.greens.find(green);
    if (found == machine.greens.end()) return kInvalidContext;
    if (flags != kNonBlocking || priority > 0 || priority < -5) return kInvalidValue;
    auto stream = make_stream(current, priority);
    stream->green = found->second;
    *made = new char;
    machine.streams[*made] = stream;
    return kSuccess;
}

// For tests: the SMs that work on this stream gets, a bit each.
API uint64_t fakegpu_sms(void *handle) {
    const Lock lock(machine.mutex);
    const auto found = machine.streams.find(handle);
    const bool green = found != machine.streams.end() && found->second->green;
    return green ? found->second->green->sms : bits(static_cast<unsigned>(sms()));
}

#endif
